"""The modules behind `tallybook.embedded`.

errors     the exceptions
binaries   finds the PostgreSQL installations of this machine
account    the user that the server runs as for root, and what that user can reach
directories  cache, run directories, locks between processes
template   runs initdb once and copies after that; copies the binaries for a user that cannot reach the installed ones
cluster    one data directory: its lock, its contents, the server that uses it, making it
guard      the server's command line, and our handle on the guard process; guard_main is that process
"""
