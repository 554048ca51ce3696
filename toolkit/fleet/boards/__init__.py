"""`tandem board`: finds boards, sets them up over SSH, looks after them, provisions many.

shell        commands on the board, as its user and as root
probe        what a board has before anything is installed
wheels       which packages it lacks, and where they come from
texts        the files that are written to it
steps        the table of steps of `tandem board init`
init         carries the steps out
care         logs, reboot, power mode
discovery    boards on USB, in the network and on serial ports
many         one bundle to all of them
provision    one board of a CSV file (provision_table)
"""
