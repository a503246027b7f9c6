"""What `skyrl-flows doctor` looks at: this machine, the services in reach, and what a configuration needs of both."""
