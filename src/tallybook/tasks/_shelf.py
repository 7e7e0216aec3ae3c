"""The app on which the ready-made tasks lie until `app.include` takes them."""

from __future__ import annotations

from tallybook._app import App

shelf = App("tallybook.tasks")
