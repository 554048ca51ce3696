"""Starts programs of Tandem so that no file of the user's takes the place of one of its packages.

packages    the names at the top of site-packages, and the finder that ties them to this folder
command     the command line that runs a module as a child process
__main__    what that command line runs
"""
