"""Optional parts: the dashboard, the operator API, the MCP server, providers, ready-made tasks, the demo."""
