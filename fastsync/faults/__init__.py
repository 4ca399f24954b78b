"""Agreement and meetings of ranks: consensus, meetings, links, clocks, exit."""
