"""Tenants' orders on three nodes: an order and its job are written where the tenant's data is."""
