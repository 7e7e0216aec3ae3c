"""The example harvester: a crawler whose pages are subjects. See README.md."""
