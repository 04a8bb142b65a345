"""The simulator: real members on simulated nodes and a faulty simulated network, in virtual time, from a seed."""
