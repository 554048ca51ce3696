from toolkit.fleet.client import *
