# The word in capitals, by whatever command.
[ "$(cat out.txt)" = BLUE ] || exit 1
