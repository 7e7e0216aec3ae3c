"""The MCP server: an agent inspects jobs over stdio, and uses the verbs that its owner allows.

server   handling of one call, from the preview of a change to the change
tools    the tools, built from operations, with lists of jobs, traces and the doctor
"""
