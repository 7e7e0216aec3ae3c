"""The services that jobs call, with their secrets: `app.providers`."""

from tallybook._model.provider import Provider, Secret, new_key
from tallybook.extra.providers.registry import Providers
from tallybook.extra.providers.steps import Rotation, Tested

__all__ = ["Provider", "Providers", "Rotation", "Secret", "Tested", "new_key"]
