"""The MCP server: an agent inspects jobs over stdio, and uses the verbs that its owner allows.

server    handling of one call                readings   lists of jobs, traces and the doctor
tools     the tools, built from operations    preview    from the preview of a change to the change
"""
