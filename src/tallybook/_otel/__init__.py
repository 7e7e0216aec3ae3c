"""The modules behind `tallybook.otel`. They are imported only when `instrument` is called."""
