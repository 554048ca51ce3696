"""`tandem board`: sets a board up over SSH, looks after it, and provisions many at the line.

shell        commands on the board, as its user and as root
probe        what a board has before anything is installed
wheels       which packages it lacks, and where they come from
texts        the files that are written to it
steps        the table of steps of `tandem board init`
init         carries the steps out
care         logs, reboot, power mode
line         provisioning from a CSV file
"""
