"""The MCP server: an agent inspects jobs over stdio, and uses the verbs that its owner allows.

server    handling of one call
tools     the tools, built from operations, with lists of jobs, traces and the doctor
preview   from the preview of a change to the change
"""
