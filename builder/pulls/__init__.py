"""Pull requests as layers: from what a forge sends to ops that the applier can judge offline."""
