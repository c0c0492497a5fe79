"""The recovery protocol: rosters over identities, generations, assignment. Used by inprocess and by the launcher."""
