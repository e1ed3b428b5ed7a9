"""Tables of the papers, run and compared with what was reported."""
