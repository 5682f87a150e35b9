# The word in capitals, by whatever command.
[ "$(cat new.txt)" = GREEN ] || exit 1
