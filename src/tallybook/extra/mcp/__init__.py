"""The MCP server: an agent looks at jobs over stdio, and acts by the verbs that its owner allows.

server    what becomes of one call           readings   lists of jobs, traces and the doctor
tools     the tools, made of operations      preview    from the preview of a change to the change
"""
