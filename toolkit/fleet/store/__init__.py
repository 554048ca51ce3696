"""What a fleet's server keeps: SQLite in the fleet's folder, or PostgreSQL by a URL.

dialects    the rows in which the two databases differ
database    one connection: statements, reads, write transactions
schema      the tables
log         the append-only, hash-chained log: the events of rollouts are the audit log
devices     devices with their last report and the operator's labels
rollouts    rollouts, releases, and the desired document of each device with its counter
lease       which servers share the fleet, which run of a farm has a board
"""
