"""What people see of runs: the terminal, reports and the dashboard. They only read records."""
