"""A price feed: holdings are shown at once, and their prices are fetched as fast as the providers allow."""
