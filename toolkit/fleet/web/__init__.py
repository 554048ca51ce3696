"""`tandem fleet web`: the fleet's page, its API and its live events, over the fleet's store.

A process of its own: it reads views and writes orders, which the server carries out. A fault in it
cannot stop the server.
"""
