"""What a board may install: signatures, versions that it has seen, and The Update Framework (TUF).

exchange    what the agent and the child process that checks say to each other
verify      the check of one desired document, step by step
desired     the rules of a desired document: device, time, counter, release
director    whose signatures a desired document needs
repository  TUF metadata: refreshed, verified and kept by python-tuf
fetchers    where its files come from: the agent's connection, HTTP(S) or a folder
journal     the highest versions that were seen, which survive a power cut
__main__    the child process

Only `exchange` is loaded by the agent: the libraries live as long as a check.
"""
