"""What rollouts interact with: environments, tools and rewards, and the processes they run in."""
