"""How the ranks of a job find each other, over a server in rank 0's task."""
