"""No models: the schema `tallybook` is not Django's. But signals of `migrate` are sent to apps that have this module."""
