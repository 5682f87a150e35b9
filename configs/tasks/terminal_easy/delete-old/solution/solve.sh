rm old.log
