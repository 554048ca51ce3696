from device.dla_emulator.arithmetic.library import *
