"""The board kit, host side: make a kit for a board, and read the report that comes back.

make         engines, cases of DLA rules and a demo -> the folder that goes to the board
weights      networks with weights that compress to next to nothing
demo_files   the demo's bundle and pictures
corrections  what a report says of the DLA's rules
measured     the times of a network, for `tandem plan --measured`
own_model    a user's model for a kit, without its weights
farm         a kit as jobs of a farm of boards, and their reports as times for a build
recorded     the outputs of a DLA, for `tandem compare --recorded`
"""
