"""Whom jobs call, with their secrets: `app.providers`."""

from tallybook.extra.providers.registry import Provider, Providers, Rotation, Secret, Tested

__all__ = ["Provider", "Providers", "Rotation", "Secret", "Tested"]
