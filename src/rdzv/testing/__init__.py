"""The simulator: the real member, on machines and a network as bad as they get, in virtual time and from a seed."""
