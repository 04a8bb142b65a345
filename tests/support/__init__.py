"""What several tests share: servers, clusters, jobs and members, started for real or simulated, and never left behind."""
