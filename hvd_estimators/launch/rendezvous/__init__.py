"""Rendezvous of a job's ranks through a server in rank 0's task."""
