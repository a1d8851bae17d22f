"""TCP between the driver and the tasks of a job: who is reached where, and who proves what."""
