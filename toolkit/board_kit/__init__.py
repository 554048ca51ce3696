"""The board kit, host side: make a kit for a board, and take the times that come back.

make         engines, cases of DLA rules and a demo -> the folder that goes to the board
measured     the times of a network, for `tandem plan --measured`
own_model    a user's model for a kit, with weights that compress to next to nothing
farm         a kit as jobs of a farm of boards, and their reports as times for a build
recorded     the outputs of a DLA, for `tandem compare --recorded`
"""
