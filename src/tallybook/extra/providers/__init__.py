"""The services that jobs call, with their secrets: `app.providers`."""

from tallybook._model.keyring import new_key
from tallybook.extra.providers.registry import Provider, Providers, Rotation, Secret, Tested

__all__ = ["Provider", "Providers", "Rotation", "Secret", "Tested", "new_key"]
