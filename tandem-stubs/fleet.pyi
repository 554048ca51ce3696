# The types of tandem.fleet, a module that tandem.py makes.
from toolkit.fleet.client import Client as Client
