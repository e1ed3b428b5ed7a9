"""Generated tasks whose answers stand at single positions of a sequence."""
