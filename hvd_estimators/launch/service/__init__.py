"""Services on the driver that receive the ranks' reports and commits while a job runs."""
