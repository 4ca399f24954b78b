"""What ranks agree on and how they meet: consensus, meetings, links, clocks, leaving."""
