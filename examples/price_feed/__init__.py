"""A price feed: it shows holdings at once, and fetches their prices as fast as the providers allow."""
