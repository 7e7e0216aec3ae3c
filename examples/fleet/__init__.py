"""Tenants' orders on three nodes: an order and its job are written to the node with the tenant's data."""
