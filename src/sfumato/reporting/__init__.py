"""What a run says about itself to people: pages and figures made from its folder."""
