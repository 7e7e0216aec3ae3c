"""The pages, one file per noun."""
