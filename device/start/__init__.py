"""Starts programs of Tandem so that no file of the user's takes the place of one of its packages.

packages    the names at the top of site-packages, and the finder that ties them to this folder
isolation   the import path of a child: without its working directory
command     the command line that runs a module as a child process
guard       ends a process with its parent
stdout      gives standard output to the result alone
child       starts a command that is not Tandem's with that guard
child_process, memory_watch   run it: lines in and out, limits, how it ended
__main__    what that command line runs
"""
