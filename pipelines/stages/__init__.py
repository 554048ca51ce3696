"""What happens to a frame between source and sink: preprocess, decode, suppress."""
