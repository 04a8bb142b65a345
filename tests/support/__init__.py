"""Servers, clusters, jobs and members that several tests share, real or simulated, and never left behind."""
