from toolkit.plugins import *
