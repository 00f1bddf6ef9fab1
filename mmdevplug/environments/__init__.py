"""Read how a launcher started this process: variables, ranks and the rendezvous."""
