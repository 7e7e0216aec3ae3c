"""The rooms behind `tallybook.embedded`.

errors     what can go wrong, as exceptions
binaries   where a PostgreSQL is installed on this machine
account    which user the server runs as when we are root, and what that user can reach
directories  cache, run directories, locks between processes
template   initdb once, copies after that; a copy of the binaries for a user that cannot reach the installed ones
cluster    one data directory: its lock, what is in it, what it says about the server that uses it, making it
settings   what the server is told on its command line
guard      our handle on the guard process; guard_main is that process
"""
