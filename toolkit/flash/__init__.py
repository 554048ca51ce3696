"""`tandem flash`: brings a bundle to one board over SSH, on a stick or through a broker."""
