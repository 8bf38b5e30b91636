-- An entry that was given back is ready when it is idle for so long: given back for now it is idle for a day, and one that is to
-- rest for so much less than this. More than any lease, and than clocks of servers that follow one another differ by.
local READY_MS = 3600000
